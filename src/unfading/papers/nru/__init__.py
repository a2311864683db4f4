"""Chandar et al. 2019: NRU."""
