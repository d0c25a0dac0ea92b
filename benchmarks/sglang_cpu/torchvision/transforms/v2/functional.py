"""Empty: image processors look their functions up here when they are called."""
