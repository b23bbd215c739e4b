"""Published weights: version store, codec, publication to engines."""
