"""The paper's table and figures: what is run for each, and the page that is made of it."""
