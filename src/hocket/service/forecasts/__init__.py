"""Questions about the future of the fleet, answered one at a time and beside the daemon."""
