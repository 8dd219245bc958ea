"""Favourite children: for each op at most one reader that should follow it on the same device."""

from hocket.planners.favourites.children import Favourites, favourite_children

__all__ = ["Favourites", "favourite_children"]
