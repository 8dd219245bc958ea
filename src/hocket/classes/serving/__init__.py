"""Answers from parts: a front end, one worker process per part, and the web service over them."""
