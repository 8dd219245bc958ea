"""What several planners share: groups of ops that move together, longest paths, annealing."""
