"""Engine: a scheduler decides on the host, a worker executes its plans on the device."""
