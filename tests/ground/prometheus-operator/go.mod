// Nothing of it is built: tests read its custom resource definitions.
module ground/prometheus-operator

go 1.24.0

require github.com/prometheus-operator/prometheus-operator v0.85.0
