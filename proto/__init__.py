"""The gRPC contract, package ``kvferry.v1``. The ``*_pb2`` modules are generated when kvferry is installed."""
