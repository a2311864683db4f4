"""Figures as Vega-Lite specifications, drawn with Altair from records and plain rows."""
