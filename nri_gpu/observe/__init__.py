"""The observer: a process that says who was given which GPU and who uses it, beside any stack, and changes nothing."""
