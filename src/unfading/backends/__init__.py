"""The implementations of the loop over time besides the reference loop, and the choice among them."""
