// injector is an NRI plugin that adds to a container what an annotation of its pod says: a ContainerAdjustment in JSON.
package main

import (
	"context"
	"flag"
	"log"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

const key = "nri-gpu.bench/adjustment"

type plugin struct{}

func (plugin) CreateContainer(_ context.Context, pod *api.PodSandbox, _ *api.Container) (
	*api.ContainerAdjustment, []*api.ContainerUpdate, error,
) {
	text, found := pod.GetAnnotations()[key]
	if !found {
		return nil, nil, nil
	}
	adjustment := &api.ContainerAdjustment{}
	return adjustment, nil, protojson.Unmarshal([]byte(text), adjustment)
}

func main() {
	socket := flag.String("socket", "", "the runtime's NRI socket")
	index := flag.String("idx", "", "where in the order of plugins it is asked")
	flag.Parse()
	injector, err := stub.New(plugin{}, stub.WithSocketPath(*socket), stub.WithPluginName("injector"), stub.WithPluginIdx(*index))
	if err == nil {
		err = injector.Run(context.Background())
	}
	log.Fatal(err)
}
