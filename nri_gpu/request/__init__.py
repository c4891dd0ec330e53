"""Requests of containers: annotations in, claims out. Pure, and suspicious of every byte."""
