"""Values everybody speaks in: frozen, standard library only."""
