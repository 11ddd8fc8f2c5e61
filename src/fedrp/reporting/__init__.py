"""Tables and plots; reads run folders only."""
