// noop is an NRI plugin that is asked about each container and adds nothing.
package main

import (
	"context"
	"flag"
	"log"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

type plugin struct{}

func (plugin) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (
	*api.ContainerAdjustment, []*api.ContainerUpdate, error,
) {
	return nil, nil, nil
}

func main() {
	socket := flag.String("socket", "", "the runtime's NRI socket")
	index := flag.String("idx", "", "where in the order of plugins it is asked")
	flag.Parse()
	nothing, err := stub.New(plugin{}, stub.WithSocketPath(*socket), stub.WithPluginName("noop"), stub.WithPluginIdx(*index))
	if err == nil {
		err = nothing.Run(context.Background())
	}
	log.Fatal(err)
}
