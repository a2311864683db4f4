"""Rusch & Mishra 2021 and 2021 (ICML), Rusch et al. 2022: coRNN, UnICORNN and LEM."""
