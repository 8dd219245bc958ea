"""Favourite children: for each op at most one reader that should follow it on the same device."""
