"""The fleet's service: a daemon that runs the jobs of many users on real devices.

    job.toml ─ spec ─▶ daemon ─ step ─▶ State ─ store ─▶ sqlite
                          │ starts, stops            ▲
                          ▼                          │ outcomes, reports
                       executors (local, ray, slurm) ┘

One thread owns the state. It receives commands (from users, through ``rest``) and outcomes (from an
executor), lets `hocket.fleet.rounds.step` decide, commits, and only then acts. A daemon that is
killed at any moment therefore finds in the store all that it has promised, and queries the executor
for the rest.
"""
