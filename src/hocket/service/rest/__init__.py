"""The service over HTTP: routes under ``/v1``, the guard before them, and how errors are told.

request ─▶ guard (host, origin, token, size) ─▶ routes ─▶ Daemon
                                                  │
problem details (RFC 9457) ◀── errors ◀───────────┘
"""
