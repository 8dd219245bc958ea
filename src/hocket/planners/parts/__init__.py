"""What several planners share: what they are, what is kept per problem, which graphs are large,
groups of ops that move together, longest paths, annealing."""
