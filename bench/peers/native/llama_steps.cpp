// llama.cpp as a step child of `kvferry bench compare` (see step_child.py for the protocol): a bare greedy loop over
// llama_decode, with nothing of a server around it. Built by install.py against the llama.cpp that is the peer.
//
//     llama-steps MODEL.gguf THREADS SEQUENCES TOKENS_PER_SEQUENCE

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include <llama.h>
#include <nlohmann/json.hpp>

namespace {

using Tokens = std::vector<llama_token>;
using Clock = std::chrono::steady_clock;

constexpr int kChunk = 512;  // tokens of one llama_decode: llama.cpp's own default for a physical batch

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class Steps {
public:
    Steps(const char* path, int threads, int sequences, int tokens) : held_(sequences) {
        llama_backend_init();
        model_ = llama_model_load_from_file(path, llama_model_default_params());
        if (!model_) throw std::runtime_error(std::string("cannot load ") + path);
        llama_context_params params = llama_context_default_params();
        params.n_ctx = static_cast<uint32_t>(sequences * tokens);
        params.n_batch = params.n_ubatch = kChunk;
        params.n_seq_max = static_cast<uint32_t>(sequences);
        params.n_threads = params.n_threads_batch = threads;
        context_ = llama_init_from_model(model_, params);
        if (!context_) throw std::runtime_error("cannot make a context");
        vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
        batch_ = llama_batch_init(std::max(kChunk, sequences), 0, 1);
    }
    ~Steps() {
        llama_batch_free(batch_);
        llama_free(context_);
        llama_model_free(model_);
    }
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    nlohmann::json run(const std::vector<Tokens>& prompts, int new_tokens) {
        if (prompts.size() > held_.size()) throw std::runtime_error("more prompts than sequences");
        std::vector<Tokens> answers(prompts.size());
        std::vector<double> steps;
        const Clock::time_point started = Clock::now();
        for (size_t row = 0; row < prompts.size(); ++row) answers[row].push_back(prefill(row, prompts[row]));
        const double first = seconds_since(started);
        for (int done = 1; done < new_tokens; ++done) {
            const Clock::time_point step = Clock::now();
            decode(answers);
            steps.push_back(seconds_since(step));
        }
        return {{"first_s", first}, {"steps_s", steps}, {"tokens", answers}};
    }

private:
    // The sequence's cache keeps what it shares with its last prompt; at least one token is computed.
    llama_token prefill(size_t sequence, const Tokens& prompt) {
        Tokens& held = held_[sequence];
        const size_t most = std::min(held.size(), prompt.size() - 1);
        const size_t kept = std::mismatch(held.begin(), held.begin() + most, prompt.begin()).first - held.begin();
        llama_memory_seq_rm(llama_get_memory(context_), static_cast<llama_seq_id>(sequence), kept, -1);
        held = prompt;
        for (size_t start = kept; start < prompt.size(); start += kChunk) {
            const size_t stop = std::min(prompt.size(), start + kChunk);
            batch_.n_tokens = 0;
            for (size_t i = start; i < stop; ++i) push(prompt[i], i, sequence, i + 1 == prompt.size());
            compute();
        }
        return best(batch_.n_tokens - 1);
    }

    void decode(std::vector<Tokens>& answers) {
        batch_.n_tokens = 0;
        for (size_t row = 0; row < answers.size(); ++row) {
            push(answers[row].back(), held_[row].size() + answers[row].size() - 1, row, true);
        }
        compute();
        for (size_t row = 0; row < answers.size(); ++row) answers[row].push_back(best(static_cast<int>(row)));
    }

    void push(llama_token token, size_t position, size_t sequence, bool wants_logits) {
        const int i = batch_.n_tokens++;
        batch_.token[i] = token;
        batch_.pos[i] = static_cast<llama_pos>(position);
        batch_.n_seq_id[i] = 1;
        batch_.seq_id[i][0] = static_cast<llama_seq_id>(sequence);
        batch_.logits[i] = wants_logits;
    }

    void compute() {
        if (const int status = llama_decode(context_, batch_)) {
            throw std::runtime_error("llama_decode: status " + std::to_string(status));
        }
    }

    llama_token best(int index) {
        const float* logits = llama_get_logits_ith(context_, index);
        return static_cast<llama_token>(std::max_element(logits, logits + vocabulary_) - logits);
    }

    llama_model* model_ = nullptr;
    llama_context* context_ = nullptr;
    llama_batch batch_{};
    int vocabulary_ = 0;
    std::vector<Tokens> held_;  // each sequence's last prompt; generated tokens are dropped before the next one
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: llama-steps MODEL.gguf THREADS SEQUENCES TOKENS_PER_SEQUENCE\n");
        return 2;
    }
    try {
        Steps steps(argv[1], std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]));
        std::cout << nlohmann::json{{"ready", llama_print_system_info()}} << std::endl;
        for (std::string line; std::getline(std::cin, line);) {
            const nlohmann::json ask = nlohmann::json::parse(line);
            std::cout << steps.run(ask.at("prompts").get<std::vector<Tokens>>(), ask.at("new_tokens").get<int>())
                      << std::endl;
        }
    } catch (const std::exception& error) {
        std::cout << nlohmann::json{{"error", error.what()}} << std::endl;
        return 1;
    }
    return 0;
}
