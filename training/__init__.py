"""Trains, aligns, distils and exports the models of a bundle."""
