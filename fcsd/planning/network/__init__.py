"""Links between endpoints, and the simulated time of an exchange over them."""
