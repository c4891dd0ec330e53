"""What containers ask for: annotations in, claims out. Pure, and suspicious of every byte."""
