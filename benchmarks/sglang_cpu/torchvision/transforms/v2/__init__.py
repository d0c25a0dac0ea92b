"""The second form of the transforms: imported by image processors, called by no text server."""
