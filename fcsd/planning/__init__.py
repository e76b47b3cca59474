"""What to expect before it is paid for: `cost` of a training or a conversion, `layers`
to rewire."""
