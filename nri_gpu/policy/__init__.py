"""The operator's rules: the policy as a value, its strict parser, and the questions asked of it. Pure."""
