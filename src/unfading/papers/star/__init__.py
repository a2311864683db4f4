"""Turkoglu et al. 2019: STAR."""
