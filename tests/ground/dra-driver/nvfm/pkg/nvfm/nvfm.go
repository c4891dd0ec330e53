// Package nvfm stands in for NVIDIA's bindings of the fabric manager, which no registry has. It has the names that
// NVIDIA's DRA driver uses, and answers every call with NotAvailable: a node without a fabric manager.
package nvfm

// Return is a status of the library's.
type Return int

const (
	SUCCESS      Return = 0
	NotAvailable Return = -1
)

func (Return) String() string { return "no fabric manager: this program was built without its library" }

type (
	FabricPartitionId uint32
	LibraryOption     struct{}
	ConnectOption     struct{}
)

func WithLibraryPath(string) LibraryOption { return LibraryOption{} }
func WithUnixSocket(string) ConnectOption  { return ConnectOption{} }
func WithAddress(string) ConnectOption     { return ConnectOption{} }
func WithTimeoutMs(uint32) ConnectOption   { return ConnectOption{} }

// GpuInfo and the types below are as long as an answer without partitions needs.
type GpuInfo struct {
	PhysicalId          uint32
	Uuid, PciBusId      [80]int8
	NumNvLinksAvailable uint32
	MaxNumNvLinks       uint32
	NvlinkLineRateMBps  uint32
}

type FabricPartitionInfo struct {
	PartitionId FabricPartitionId
	IsActive    uint32
	NumGpus     uint32
	GpuInfo     [8]GpuInfo
}

type FabricPartitionList struct {
	NumPartitions uint32
	PartitionInfo [8]FabricPartitionInfo
}

// Interface is the library, Handle a connection to the fabric manager.
type Interface interface {
	Init() Return
	Shutdown() Return
	Connect(...ConnectOption) (Handle, Return)
}

type Handle interface {
	Disconnect() Return
	GetSupportedFabricPartitions() (FabricPartitionList, Return)
	ActivateFabricPartition(FabricPartitionId) Return
	DeactivateFabricPartition(FabricPartitionId) Return
}

type absent struct{}

func New(...LibraryOption) Interface { return absent{} }

func (absent) Init() Return                              { return NotAvailable }
func (absent) Shutdown() Return                          { return SUCCESS }
func (absent) Connect(...ConnectOption) (Handle, Return) { return nil, NotAvailable }
