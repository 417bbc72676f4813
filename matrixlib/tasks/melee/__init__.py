"""Melee: imitating the players of recorded games."""
