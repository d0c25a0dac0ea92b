"""The second form of the transforms, which image processors import and a text server never calls."""
