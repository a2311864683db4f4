"""Kag, Zhang & Saligrama 2020: the incremental RNN."""
