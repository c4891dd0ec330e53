"""What the operator allows: the policy as a value, its strict parser, and the questions asked of it. Pure."""
