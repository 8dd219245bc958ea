"""The service over HTTP: routes under ``/v1``, authentication before them, and error responses.

request ─▶ checks (host, origin, token, size) ─▶ routes ─▶ Daemon
                                                   │
problem details (RFC 9457) ◀── errors ◀────────────┘
"""
