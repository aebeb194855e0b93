"""Matrix of similarities in tiles: sums along both axes, coefficients of the gradients, in torch and in Triton."""
