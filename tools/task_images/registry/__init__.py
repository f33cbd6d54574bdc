"""A client of container registries: names of images, logins, manifests and layers."""
