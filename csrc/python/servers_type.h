// _C.Servers: values on the servers of a cluster, known by digests of their keys.
#pragma once

#include <Python.h>

#include "stocache-torch/src/bridge.rs.h"

namespace stocache::python {

// What open_cluster() and Servers.open() take: url, name, fingerprint, secret, milliseconds that
// values stay. False with a Python error if it is something else.
bool to_cluster(PyObject* args, bridge::ClusterOptions& options);
// A list with a dict for each server.
PyObject* server_dicts(const ::rust::Vec<bridge::ClusterServer>& servers);

bool add_servers(PyObject* module);

}  // namespace stocache::python
