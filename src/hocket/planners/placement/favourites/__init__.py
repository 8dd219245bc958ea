"""Favourite children: the edges whose transfer a schedule should try hardest to avoid.

Hanen and Munier, "An approximation algorithm for scheduling dependent tasks on m processors with
small communication delays", 1995; used by Baechi's m-SCT (Jeon et al., SoCC 2020).

If each op has at most one favourite child and at most one favourite parent, and transfers between
favourites are free, how short can the longest path become? The relaxation allows shares y between 0
and 1 per edge, at most 1 in all per op on either side, and shortens an edge of c seconds to
(1 - y) c. Small problems are solved exactly (`linear`), large ones nearly (`frank_wolfe`); the shares are then
rounded by a matching (`matching`).
"""
