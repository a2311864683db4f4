"""Figures as Altair charts or Vega-Lite specifications, drawn from records and plain values."""
