"""The live page of the service: pictures and tables of a fleet, rendered on the server."""
