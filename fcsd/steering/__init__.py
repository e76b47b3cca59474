"""Where tokens go and over which links: `network` measures and simulates exchanges,
`routing` studies and steers routers."""
