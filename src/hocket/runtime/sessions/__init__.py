"""Runs from beginning to end, a file per kind of work; `hocket.runtime.session` chooses."""
