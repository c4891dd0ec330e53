"""The things that a granted container receives, as one neutral set of edits."""
