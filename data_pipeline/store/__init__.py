"""Object stores: S3, a folder or memory behind one interface, with network failures handled."""
