"""The fleet's service: runs the jobs of many people on devices that exist.

    job.toml ─ spec ─▶ daemon ─ step ─▶ State ─ store ─▶ sqlite
                          │ starts, stops            ▲
                          ▼                          │ outcomes, reports
                       executors (local, ray, slurm) ┘

One thread owns the state. It takes commands (from people, through ``rest``) and outcomes (from an
executor), lets `hocket.fleet.rounds.step` decide, commits, and only then acts. So a daemon that was
killed at any moment finds in the store all that it promised, and asks the executor for the rest.
"""
