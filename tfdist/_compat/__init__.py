"""Private names of TensorFlow and Keras, call-stack lookups and version differences. No other module uses them."""
