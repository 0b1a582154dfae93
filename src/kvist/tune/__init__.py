"""What a lossy KV cache costs on a user's own text, and the calibration that makes it cheap."""
