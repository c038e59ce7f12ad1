// ModelService.UploadLora over a real socket, with a clock of the test's.
#include "server/rpc/upload_call.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <variant>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "latentd/v1/model.grpc.pb.h"
#include "server/rpc/grpc_errors.h"
#include "server/rpc/model_service.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr int64_t kQuota = int64_t{64} << 20;

// Stands still unless it is told to go on.
class TestClock {
 public:
  absl::Time Read() {
    MutexLock lock(&mu_);
    ++reads_;
    changed_.SignalAll();
    return now_;
  }
  void Pass(absl::Duration time) {
    MutexLock lock(&mu_);
    now_ += time;
  }
  // Returns when the watch has looked at all uploads. It reads the clock once a round; one more reading may
  // be of the upload itself, whose last message has just come.
  void WaitForARound() {
    MutexLock lock(&mu_);
    for (const int64_t enough = reads_ + 3; reads_ < enough;) changed_.Wait(&mu_);
  }

 private:
  Mutex mu_;
  CondVar changed_;
  absl::Time now_ ABSL_GUARDED_BY(mu_) = absl::Now();
  int64_t reads_ ABSL_GUARDED_BY(mu_) = 0;
};

class UploadCallTest : public ::testing::Test {
 protected:
  UploadCallTest() : root_(fs::path(::testing::TempDir()) / absl::StrCat("upload_call_", getpid())) {
    fs::create_directories(root_);
    Config config;
    config.devices = {"cpu"};
    config.ram_cap = int64_t{1} << 30;
    config.state_dir = "";
    config.upload_dir = (root_ / "uploads").string();
    config.upload_total_bytes = kQuota;
    config.upload_idle_timeout = absl::InfiniteDuration();
    auto core = ServerCore::Create(config);
    EXPECT_TRUE(core.ok()) << core.status();
    core_ = *std::move(core);
    core_->upload_watch = std::make_unique<UploadWatch>(core_.get(), [this] { return clock_.Read(); });
    service_ = std::make_unique<ModelServiceImpl>(core_.get());
    const std::string address = absl::StrCat("unix:", (root_ / "socket").string());
    server_ = grpc::ServerBuilder()
                  .AddListeningPort(address, grpc::InsecureServerCredentials())
                  .RegisterService(service_.get())
                  .BuildAndStart();
    stub_ = v1::ModelService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  }
  ~UploadCallTest() override {
    server_->Shutdown();
    core_.reset();
    fs::remove_all(root_);
  }

  // An upload whose messages are sent one by one.
  struct Upload {
    Upload(v1::ModelService::Stub* stub, int64_t size) {
      context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Minutes(1)));
      writer = stub->UploadLora(&context, &response);
      v1::UploadLoraRequest request;
      request.mutable_header()->set_name("x");
      request.mutable_header()->set_sha256(std::string(64, 'a'));
      request.mutable_header()->set_size(size);
      writer->Write(request);
    }
    void Send(const std::string& data) {
      v1::UploadLoraRequest request;
      request.mutable_chunk()->set_offset(sent);
      request.mutable_chunk()->set_data(data);
      sent += static_cast<int64_t>(data.size());
      writer->Write(request);
    }
    absl::Status Finish() { return FromGrpcStatus(writer->Finish()); }

    grpc::ClientContext context;
    v1::UploadLoraResponse response;
    std::unique_ptr<grpc::ClientWriter<v1::UploadLoraRequest>> writer;
    int64_t sent = 0;
  };

  fs::path incoming() const { return root_ / "uploads/.incoming"; }
  int64_t IncomingBytes() const {
    int64_t bytes = 0;
    std::error_code error;
    for (const auto& entry : fs::recursive_directory_iterator(incoming(), error)) {
      if (entry.is_regular_file()) bytes += static_cast<int64_t>(entry.file_size());
    }
    return bytes;
  }
  void WaitForIncomingBytes(int64_t bytes) const {
    while (IncomingBytes() != bytes) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

  const fs::path root_;
  TestClock clock_;
  std::unique_ptr<ServerCore> core_;
  std::unique_ptr<ModelServiceImpl> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::ModelService::Stub> stub_;
};

TEST_F(UploadCallTest, AnUploadThatIsTooSlowOnTheWholeEndsAndLeavesNothing) {
  // Ten minutes, and a second for each 256 KiB.
  Upload upload(stub_.get(), int64_t{100} * 256 * 1024);
  upload.Send("some");
  WaitForIncomingBytes(4);
  EXPECT_EQ(core_->ram->stats().reserved_bytes, 2 << 20);
  clock_.Pass(absl::Minutes(10) + absl::Seconds(99));
  clock_.WaitForARound();
  upload.Send(" more");  // it is slow, but in time
  WaitForIncomingBytes(9);
  clock_.Pass(absl::Seconds(2));
  const absl::Status status = upload.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ErrorReason(status), "UPLOAD_STALLED");
  EXPECT_THAT(std::string(status.message()), HasSubstr("too slow"));
  EXPECT_TRUE(fs::is_empty(incoming()));
  EXPECT_EQ(core_->ram->stats().reserved_bytes, 0);
  const UploadHeader all{.name = "all", .sha256 = std::string(64, 'a'), .size = kQuota};
  EXPECT_TRUE(core_->uploads->Begin(all).ok()) << "the quota has its bytes again";
}

TEST_F(UploadCallTest, AServerThatGoesDownTakesNoNewUpload) {
  core_->upload_watch->Drain();
  Upload upload(stub_.get(), 10);
  const absl::Status status = upload.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorReason(status), "SERVER_DRAINING");
  EXPECT_TRUE(fs::is_empty(incoming()));
}

}  // namespace
}  // namespace latentd
