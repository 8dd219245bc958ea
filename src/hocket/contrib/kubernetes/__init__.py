"""Jobs of a fleet as manifests for Kubernetes: start with `manifests`."""
