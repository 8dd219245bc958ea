"""What several planners share: what they are, what is kept per problem, groups of ops that move
together, longest paths, annealing."""
