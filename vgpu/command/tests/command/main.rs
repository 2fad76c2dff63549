//! The command `vgpu` as a user calls it: output in all forms, and exit codes.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::NamedTempFile;

/// A file of this folder.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/command").join(name)
}

/// A temporary file with this text.
fn temporary(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

/// Calls the command. Gives the exit code and standard output, or standard error where there is no
/// other output.
fn vgpu(arguments: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_vgpu")).args(arguments).output().unwrap();
    let Output { status, stdout, stderr } = output;
    let text = String::from_utf8(if stdout.is_empty() { stderr } else { stdout }).unwrap();
    (status.code().unwrap(), text)
}

/// `vgpu run` of a kernel of `last_block.ptx`.
fn run(kernel: &str, more: &[&str]) -> (i32, String) {
    let ptx = file("last_block.ptx");
    vgpu(&[&["run", ptx.to_str().unwrap(), kernel], more].concat())
}

const LAST_BLOCK: [&str; 10] =
    ["--grid", "4", "--block", "1", "--arg", "buf:f32:4", "--arg", "buf:u32:1=zero", "--arg", "buf:f32:1"];

fn last_block(more: &[&str]) -> (i32, String) {
    run("last_block", &[&LAST_BLOCK, more].concat())
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Fails unless a document has the parts that SARIF 2.1.0 requires, and indices that lead
/// somewhere.
fn assert_is_sarif(document: &Value) {
    assert_eq!(document["version"], "2.1.0");
    assert!(document["$schema"].as_str().unwrap().ends_with("sarif-2.1.0.json"));
    let location = |location: &Value| {
        let physical = &location["physicalLocation"];
        let uri = physical["artifactLocation"]["uri"].as_str().unwrap();
        assert!(!uri.is_empty() && !uri.contains(' '), "{uri}");
        assert!(physical["region"]["startLine"].as_u64().unwrap() >= 1);
        for logical in location["logicalLocations"].as_array().into_iter().flatten() {
            assert!(!logical["fullyQualifiedName"].as_str().unwrap().is_empty());
        }
    };
    for run in document["runs"].as_array().unwrap() {
        let driver = &run["tool"]["driver"];
        assert_eq!(driver["name"], "vgpu");
        let rules = driver["rules"].as_array().unwrap();
        for rule in rules {
            assert!(rule["id"].is_string() && rule["shortDescription"]["text"].is_string());
        }
        for invocation in run["invocations"].as_array().unwrap() {
            assert!(invocation["executionSuccessful"].is_boolean());
            for note in invocation["toolExecutionNotifications"].as_array().unwrap() {
                assert!(note["message"]["text"].is_string());
            }
        }
        for result in run["results"].as_array().unwrap() {
            assert!(result["message"]["text"].is_string());
            assert!(["error", "warning", "note"].contains(&result["level"].as_str().unwrap()));
            let rule = &rules[result["ruleIndex"].as_u64().unwrap() as usize];
            assert_eq!(rule["id"], result["ruleId"]);
            assert!(result["occurrenceCount"].as_u64().unwrap() >= 1);
            result["locations"].as_array().into_iter().flatten().for_each(location);
            for related in result["relatedLocations"].as_array().into_iter().flatten() {
                location(related);
                assert!(related["id"].is_u64());
            }
            for stack in result["stacks"].as_array().into_iter().flatten() {
                stack["frames"].as_array().unwrap().iter().for_each(|frame| location(&frame["location"]));
            }
            for print in result["partialFingerprints"].as_object().into_iter().flatten() {
                assert!(print.1.is_string());
            }
            for suppression in result["suppressions"].as_array().into_iter().flatten() {
                assert_eq!(suppression["kind"], "external");
            }
        }
    }
}

#[test]
fn without_checks_a_kernel_runs_and_its_buffers_are_printed_or_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("parts.bin");
    let written = format!("0={}", path.display());
    let (code, text) = last_block(&["--out", "2", "--out", &written]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("argument 2: 6\n"), "{text}");
    assert!(text.ends_with("last_block(float*, unsigned int*, float*): 1 run, 0 reports\n"), "{text}");
    let parts: Vec<u8> = (0..4).flat_map(|part| (part as f32).to_ne_bytes()).collect();
    assert_eq!(std::fs::read(&path).unwrap(), parts);
    // The file is an input as well.
    let input = format!("buf:f32=@{}", path.display());
    let (code, text) = run("waits", &["--arg", &input]);
    assert_eq!(code, 1, "its first word is 0: {text}");
}

/// Writes the first half of the second word of `own`, and reads nothing.
const WRITE_HALF: &str = "
.version 8.1
.target sm_90
.address_size 64
.visible .entry half(.param .u64 own)
{
.reg .b16 %h<2>;
.reg .b64 %rd<2>;
ld.param.u64 %rd1, [own];
mov.u16 %h1, 7;
st.global.u16 [%rd1+4], %h1;
st.global.u16 [%rd1+8], %h1;
st.global.u16 [%rd1+10], %h1;
ret;
}
";

#[test]
fn elements_that_nothing_has_written_are_no_numbers() {
    let ptx = temporary(WRITE_HALF);
    let path = ptx.path().to_str().unwrap();
    let call = |buffer: &str, more: &[&str]| {
        let call = ["run", path, "--block", "1", "--arg", buffer, "--seeds", "0..4"];
        vgpu(&[&call, more].concat())
    };
    for mode in ["--check", "--weak"] {
        let (code, text) = call("buf:u32:3", &[mode, "--out", "0"]);
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("argument 0: - - 458759\n") && !text.contains("differ"), "{text}");
        let (_, text) = call("buf:u16:6", &[mode, "--out", "0"]);
        assert!(text.contains("argument 0: - - 7 - 7 7\n") && !text.contains("differ"), "{text}");
        let (_, text) = call("buf:u32:3=iota", &[mode, "--out", "0"]);
        assert!(text.contains("argument 0: 0 7 458759\n"), "{text}");
        let file = NamedTempFile::new().unwrap();
        let (_, text) = call("buf:u32:3", &[mode, "--out", &format!("0={}", file.path().display())]);
        assert_eq!(std::fs::read(file.path()).unwrap(), [0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 7, 0], "{text}");
    }
    // Other modes do not track them.
    let (_, text) = call("buf:u32:3", &["--out", "0"]);
    assert!(!text.contains("argument 0: -") && text.contains("differ"), "{text}");
}

#[test]
fn a_race_is_reported_with_names_lines_seeds_and_a_class() {
    let (code, text) = last_block(&["--check", "--seeds", "0..20"]);
    assert_eq!(code, 1, "{text}");
    for part in [
        "race (corrupts), ",
        ", seeds 0, ",
        "at kernels/last_block.cu:4",
        "at kernels/last_block.cu:7",
        "in kernel 'last_block(float*, unsigned int*, float*)', block",
        "no fence stands before it",
        "20 runs, 1 report",
    ] {
        assert!(text.contains(part), "without '{part}': {text}");
    }
    assert!(!text.contains("_Z10"), "{text}");
}

#[test]
fn a_kernel_with_its_fences_has_no_report() {
    let text = std::fs::read_to_string(file("last_block.ptx")).unwrap();
    let mended = temporary(&text.replace("//FENCE", "membar.gl;"));
    let path = mended.path().to_str().unwrap();
    let call = [&["run", path, "last_block"], &LAST_BLOCK[..], &["--seeds", "0..20", "--out", "2"]].concat();
    for mode in ["--check", "--weak"] {
        let (code, text) = vgpu(&[&call[..], &[mode]].concat());
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("argument 2: 6\n") && !text.contains("differ"), "{text}");
    }
    // Without the fences, weak memory shows in the results.
    let (code, text) = last_block(&["--weak", "--seeds", "0..200", "--out", "2"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("the outputs differ between seeds"), "{text}");
}

#[test]
fn every_schedule_of_a_small_kernel_is_run() {
    let two = ["--block", "1", "--arg", "buf:f32:2", "--arg", "buf:u32:1=zero", "--arg", "buf:f32:1"];
    let call = |path: &Path, more: &[&str]| {
        let call = ["run", path.to_str().unwrap(), "last_block", "--grid", "2", "--out", "2"];
        vgpu(&[&call, &two[..], more].concat())
    };
    let text = std::fs::read_to_string(file("last_block.ptx")).unwrap();
    let mended = temporary(&text.replace("//FENCE", "membar.gl;"));
    for mode in ["--check", "--weak"] {
        let (code, text) = call(mended.path(), &[mode, "--explore", "20"]);
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("argument 2: 1\n") && !text.contains("differ"), "{text}");
        assert!(text.contains("complete: every schedule was explored"), "{text}");
    }
    let (code, text) = call(&file("last_block.ptx"), &["--weak", "--explore", "0"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("the outputs differ between runs 1 and 2"), "{text}");
    assert!(text.contains("all schedules without preemptions were explored, others exist"), "{text}");
    let call =
        |more: &[&str]| call(&file("last_block.ptx"), &[&["--check", "--explore", "3"], more].concat());
    let (code, text) = call(&[]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("race (corrupts), ") && !text.contains("seeds"), "{text}");
    let (_, text) = call(&["--runs", "2", "--format", "json"]);
    let document = json(&text);
    assert_eq!(document["explored"]["runs"], 2, "{text}");
    assert_eq!((&document["explored"]["complete"], &document["seeds"]), (&Value::Bool(false), &Value::Null));
    assert_eq!(call(&["--seeds", "0..2"]).0, 2);
}

#[test]
fn an_accept_list_silences_reports_and_names_entries_without_use() {
    let lines = "# known\n\
                 race last_block( last_block.cu:7 last_block.cu:4 -- found by the tests\n\
                 race * ptx:1 -- stale\n";
    let list = temporary(lines);
    let path = list.path().to_str().unwrap();
    let (code, text) = last_block(&["--check", "--seeds", "0..5", "--accept", path]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("accepted: race (corrupts), ") && text.contains("found by the tests"), "{text}");
    assert!(text.contains("line 3 of the accept list has accepted nothing: stale"), "{text}");
    assert!(text.contains("0 reports, 1 accepted"), "{text}");
    let (_, text) = last_block(&["--check", "--accept", path, "--format", "sarif"]);
    let sarif = json(&text);
    assert_is_sarif(&sarif);
    let suppressions = &sarif["runs"][0]["results"][0]["suppressions"];
    assert_eq!(suppressions[0]["justification"], "found by the tests");
    let (_, text) = last_block(&["--check", "--accept", path, "--format", "json"]);
    assert_eq!(json(&text)["reports"][0]["accepted"], "found by the tests");
}

#[test]
fn json_and_sarif_have_the_lines_of_both_sides() {
    let (code, text) = last_block(&["--check", "--seeds", "3", "--format", "json"]);
    assert_eq!(code, 1);
    let document = json(&text);
    assert_eq!(document["kernel"], "last_block(float*, unsigned int*, float*)");
    assert_eq!(document["seeds"], serde_json::json!([3, 4]));
    let report = &document["reports"][0];
    assert_eq!((&report["kind"], &report["class"]), (&"race".into(), &"corrupts".into()));
    assert!(report["occurrences"].as_u64().unwrap() >= 1);
    let places = report["places"].as_array().unwrap();
    let mut lines: Vec<u64> = places.iter().map(|place| place["line"].as_u64().unwrap()).collect();
    lines.sort_unstable();
    assert_eq!(lines, [4, 7]);
    let ptx = std::fs::read_to_string(file("last_block.ptx")).unwrap();
    for place in places {
        let line = ptx.lines().nth(place["ptx_line"].as_u64().unwrap() as usize - 1).unwrap();
        assert_eq!(line.trim(), place["ptx_text"].as_str().unwrap());
    }

    let (code, text) = last_block(&["--check", "--seeds", "3", "--format", "sarif"]);
    assert_eq!(code, 1);
    let sarif = json(&text);
    assert_is_sarif(&sarif);
    let results = sarif["runs"][0]["results"].as_array().unwrap();
    assert_eq!((results.len(), &results[0]["level"]), (1, &"error".into()));
    let physical = &results[0]["locations"][0]["physicalLocation"];
    assert_eq!(physical["artifactLocation"]["uri"], "kernels/last_block.cu");
    let related = results[0]["relatedLocations"].as_array().unwrap();
    assert_eq!(related.len(), 3, "the other side, and both in the PTX: {related:?}");

    // Documents without results are documents too.
    let (code, text) = last_block(&["--format", "sarif"]);
    assert_eq!(code, 0);
    assert_is_sarif(&json(&text));
}

#[test]
fn calls_that_led_to_an_inlined_line_are_in_all_formats() {
    let ptx = std::fs::read_to_string(file("last_block.ptx")).unwrap();
    let store = "    st.global.u64 [%rd1+4096], %rd1;";
    let inlined = ".loc 7 2 1\n.loc 7 9 3, function_name $L, inlined_at 7 5 1\n\
                   .loc 8 3 2, function_name $L, inlined_at 7 9 3\n";
    let ptx = ptx.replace(store, &format!("{inlined}{store}"));
    let called = temporary(&format!("{ptx}\n.file 7 \"kernels/rows.cu\"\n.file 8 \"store.cuh\"\n"));
    let path = called.path().to_str().unwrap();
    let run = |format: &str| {
        let arguments =
            ["run", path, "beyond", "--block", "1", "--arg", "buf:u32:1=zero", "--format", format];
        let (code, text) = vgpu(&arguments);
        assert_eq!(code, 1, "{text}");
        text
    };
    let text = run("text");
    let place = "at kernels/rows.cu:9 (inlined: store.cuh:3), called at :5\n";
    assert!(text.contains(place), "{text}");
    let callers = &json(&run("json"))["reports"][0]["places"][0]["callers"];
    assert_eq!(*callers, serde_json::json!([{ "source": "kernels/rows.cu", "line": 5 }]));
    let sarif = json(&run("sarif"));
    assert_is_sarif(&sarif);
    let frames = sarif["runs"][0]["results"][0]["stacks"][0]["frames"].as_array().unwrap();
    let line = |frame: &Value| frame["location"]["physicalLocation"]["region"]["startLine"].as_u64().unwrap();
    assert_eq!(frames.iter().map(line).collect::<Vec<_>>(), [9, 5]);
}

#[test]
fn faults_and_hangs_are_reports() {
    let word = ["--block", "1", "--arg", "buf:u32:1=zero"];
    for (kernel, more, parts) in [
        ("beyond", &[][..], &["out-of-bounds (bounds)", "'argument 0'"][..]),
        ("beyond", &["--check"], &["out-of-bounds (bounds)"]),
        ("waits", &[], &["hang (synchronisation)", "spins on"]),
        ("waits", &["--check"], &["hang (synchronisation)"]),
    ] {
        let (code, text) = run(kernel, &[&word, more].concat());
        assert_eq!(code, 1, "{kernel}: {text}");
        for part in parts {
            assert!(text.contains(part), "{kernel}, without '{part}': {text}");
        }
        assert!(text.contains(", ended the run"), "{text}");
        let (_, text) = run(kernel, &[&word, more, &["--format", "json"]].concat());
        assert_eq!(json(&text)["reports"][0]["ended_run"], true, "{text}");
        let (code, text) = run(kernel, &[&word, more, &["--format", "sarif"]].concat());
        assert_eq!(code, 1, "{kernel}: {text}");
        assert_is_sarif(&json(&text));
    }
}

#[test]
fn reads_of_registers_that_nothing_writes_are_reports() {
    let word = ["--block", "1", "--arg", "buf:u32:1=zero"];
    let check = ["--check", "--seeds", "0..3"];
    let (code, text) = run("register", &[&word[..], &check].concat());
    assert_eq!(code, 1, "{text}");
    for part in ["unwritten-register (lifetime), 3 times", "read of register '%r1'", "PTX line 89"] {
        assert!(text.contains(part), "without '{part}': {text}");
    }
    // The kernel goes on.
    assert!(!text.contains("ended the run"), "{text}");
    let (code, text) = run("register", &word);
    assert_eq!(code, 0, "{text}");
    let list = temporary("unwritten-register register ptx:89 -- the host does not read the word\n");
    let accept = ["--check", "--accept", list.path().to_str().unwrap()];
    let (code, text) = run("register", &[&word[..], &accept].concat());
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("accepted: unwritten-register (lifetime)"), "{text}");
    assert!(text.contains("0 reports, 1 accepted") && !text.contains("has accepted nothing"), "{text}");
}

#[test]
fn reports_of_one_cause_are_grouped() {
    // The parts are read on two lines.
    let text = std::fs::read_to_string(file("last_block.ptx")).unwrap();
    let read = "ld.global.f32 %f3, [%rd1];";
    let text = text.replacen(read, &format!("{read}\n.loc 1 9 9\n{read}"), 1);
    let twice = temporary(&text);
    let path = twice.path().to_str().unwrap();
    let call = [&["run", path, "last_block"], &LAST_BLOCK[..], &["--check"]].concat();
    let (code, text) = vgpu(&call);
    assert_eq!(code, 1, "{text}");
    for part in [
        "\n  gap: the flag's write is no release, and the writer has no fence ahead of it",
        "\ncause: 2 reports, ",
        "; the flag's read is no acquire, and the reader has no fence behind it: it needs one of scope .gpu or wider \
         (kernels/last_block.cu:5, PTX line ",
        ", in kernel 'last_block')\n",
        "1 run, 2 reports\n",
    ] {
        assert!(text.contains(part), "without '{part}': {text}");
    }
    let (_, text) = vgpu(&[&call[..], &["--format", "json"]].concat());
    let all = json(&text);
    assert_eq!(all["causes"][0]["reports"], 2, "{text}");
    for report in all["reports"].as_array().unwrap() {
        assert_eq!(report["cause"], 0, "{text}");
        let [write, read] = report["gaps"].as_array().unwrap().as_slice() else { panic!("{text}") };
        assert_eq!((&write["kind"], &write["side"]), (&"no-fence".into(), &"writer".into()));
        assert_eq!((&read["needs"], &read["place"]["line"]), (&".gpu".into(), &5.into()));
    }
    let (_, text) = vgpu(&[&call[..], &["--format", "sarif"]].concat());
    assert_is_sarif(&json(&text));
}

#[test]
fn devices_address_each_others_buffers() {
    let arguments = ["--block", "1", "--arg", "buf:u32:4=iota", "--arg", "peer:0", "--arg", "device"];
    let (code, text) = run("peers", &[&arguments[..], &["--devices", "2", "--check", "--out", "0"]].concat());
    assert_eq!(code, 0, "{text}");
    // Device 0 has read word 1 of device 1.
    assert!(text.contains("argument 0: 5 1 1 3\n"), "{text}");
}

/// Each device adds its number and 1 to a word of all devices.
const ADD_TO_ALL: &str = "
.version 8.1
.target sm_90
.address_size 64
.visible .entry add(.param .u64 own, .param .u64 all, .param .u32 device)
{
.reg .b32 %r<2>;
.reg .b64 %rd<2>;
ld.param.u64 %rd1, [all];
ld.param.u32 %r1, [device];
add.u32 %r1, %r1, 1;
multimem.red.global.add.u32 [%rd1+4], %r1;
ret;
}
";

#[test]
fn devices_have_a_multicast_address_of_all_buffers() {
    let ptx = temporary(ADD_TO_ALL);
    let path = ptx.path().to_str().unwrap();
    let call = |more: &[&str]| {
        let arguments = ["--block", "1", "--arg", "buf:u32:2=iota", "--arg", "all:0", "--arg", "device"];
        vgpu(
            &[&["run", path, "add", "--devices", "4", "--check", "--out", "0"], &arguments[..], more]
                .concat(),
        )
    };
    for more in [&["--seeds", "0..20"][..], &["--explore", "1"]] {
        let (code, text) = call(more);
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("argument 0: 0 11\n") && !text.contains("differ"), "{text}");
    }
    let (code, text) = vgpu(&["run", path, "add", "--block", "1", "--arg", "u64:0", "--arg", "all:0"]);
    assert_eq!(code, 2, "{text}");
}

#[test]
fn assumptions_and_limits_are_taken() {
    let (code, text) =
        last_block(&["--check", "--assume", "FenceBeforeBarrier", "--assume", "ConvergedWarps"]);
    assert_eq!(code, 1, "no fence stands anywhere: {text}");
    // The first report ends each run.
    let (code, text) = last_block(&["--check", "--reports", "0", "--seeds", "0..4"]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("race (corrupts), 4 times"), "{text}");
}

#[test]
fn bad_usage_ends_with_2_and_says_what_is_wrong() {
    let missing = file("missing.ptx");
    let refused = file("refused.ptx");
    let arguments = |list: &[&'static str]| -> Vec<&'static str> { list.to_vec() };
    for (more, error) in [
        (arguments(&["--arg", "u32:1"]), "takes 3 arguments, 1 were given"),
        ([&LAST_BLOCK[..9], &["u8:1"]].concat(), "has 8 bytes, its argument has 1"),
        (arguments(&["--arg", "u32:1"]), "parameter 2: 8 bytes, 'out'"),
        ([&LAST_BLOCK[..], &["--out", "3"]].concat(), "argument 3 is no buffer"),
        ([&LAST_BLOCK[4..], &["--block", "2000"]].concat(), "must be from 1 to [1024, 1024, 64]"),
        (
            [&LAST_BLOCK[..], &["--check", "--assume", "Nothing"]].concat(),
            "FenceBeforeBarrier, ConvergedWarps, ClusterArrivals, ReadsBeforeBulkCopies, CoherentLoads",
        ),
        ([&LAST_BLOCK[..], &["--accept", "Cargo.toml"]].concat(), "--accept is for --check"),
        (arguments(&["--seeds", "3..3"]), "has no seed"),
        // Calls that would run nothing.
        ([&LAST_BLOCK[..], &["--check", "--explore", "1", "--runs", "0"]].concat(), "--runs <N>"),
        (arguments(&["--grid", "1,2,3,4"]), "more than three dimensions"),
        (arguments(&["--arg", "buf:f32:4=@/nonexistent"]), "cannot read /nonexistent"),
        (arguments(&["--nothing"]), "--nothing"),
    ] {
        let (code, text) = run("last_block", &more);
        assert_eq!(code, 2, "{more:?}: {text}");
        assert!(text.contains(error), "{more:?}, without '{error}': {text}");
    }
    let cuda = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernel.cu");
    std::fs::write(&cuda, "__global__ void k() {}").unwrap();
    for (call, error) in [
        (vec!["run", cuda.to_str().unwrap()], "`nvcc -ptx -lineinfo` compiles CUDA C++ to PTX"),
        (vec!["run", missing.to_str().unwrap()], "cannot read"),
        (vec!["run", refused.to_str().unwrap()], "several kernels"),
        (vec!["run", refused.to_str().unwrap(), "first"], "`vgpu check` lists all reasons"),
        (vec!["check", missing.to_str().unwrap()], "cannot read"),
        (vec!["fuzz", "--programs", "0"], "--programs <N>"),
        (vec!["fuzz", "--limit", "0"], "--limit <SECONDS>"),
        (vec![], "Usage"),
    ] {
        let (code, text) = vgpu(&call);
        assert_eq!(code, 2, "{call:?}: {text}");
        assert!(text.contains(error), "{call:?}, without '{error}': {text}");
    }
    let (code, text) = run("a", &[]);
    assert_eq!(code, 2);
    assert!(text.contains("several kernels have 'a' in their names"), "{text}");
}

#[test]
fn help_says_what_exit_codes_mean() {
    for call in [&["--help"][..], &["run", "--help"]] {
        let (code, text) = vgpu(call);
        assert_eq!(code, 0);
        assert!(text.contains("Exit codes:") && text.contains("bad usage"), "{text}");
    }
}

#[test]
fn check_lists_everything_that_is_refused() {
    let path = file("refused.ptx");
    let path = path.to_str().unwrap();
    let (code, text) = vgpu(&["check", path]);
    assert_eq!(code, 1, "{text}");
    for part in [
        "in kernel 'first()'",
        "at kernels/refused.cu:12",
        "refused.ptx:17:5: instruction 'frobnicate' is not supported",
        "refused.ptx:18:",
        "refused.ptx:20:",
        "in kernel 'calls'",
        "refused.ptx:9:",
        "refused.ptx:32:",
        "1 of 3 kernels run",
    ] {
        assert!(text.contains(part), "without '{part}': {text}");
    }
    let (code, text) = vgpu(&["check", path, "--format", "json"]);
    assert_eq!(code, 1);
    let lines: Vec<u64> = json(&text)["reports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|report| report["places"][0]["ptx_line"].as_u64().unwrap())
        .collect();
    // The function is called twice, and refused once.
    assert_eq!(lines, [17, 18, 20, 9, 32]);
    let (_, text) = vgpu(&["check", path, "--format", "sarif"]);
    assert_is_sarif(&json(&text));
    // A refusal in one kernel leaves the others alone.
    let (code, text) = vgpu(&["run", path, "clean"]);
    assert_eq!(code, 0, "{text}");
    let good = file("last_block.ptx");
    let (code, text) = vgpu(&["check", good.to_str().unwrap()]);
    assert_eq!(code, 0, "{text}");
    assert!(text.ends_with("5 of 5 kernels run\n"), "{text}");
    assert!(text.contains("register: nothing writes '%r1', read at PTX line 89\n"), "{text}");
    // Instances of a template have one note.
    let kernel = |name: &str, registers: [&str; 2]| {
        let [a, b] = registers;
        format!(
            ".visible .entry {name}(.param .u64 p)\n{{\n.reg .b32 %r<9>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [p];\n\
             .loc 1 7 0\nst.global.v2.u32 [%rd1], {{{a}, {b}}};\nret;\n}}\n"
        )
    };
    let head = ".version 8.4\n.target sm_90\n.address_size 64\n.file 1 \"pairs.cu\"\n";
    let [one, two] =
        [kernel("_Z5pairsILi1EEvPj", ["%r1", "%r2"]), kernel("_Z5pairsILi2EEvPj", ["%r3", "%r4"])];
    let both = temporary(&format!("{head}{one}{two}"));
    let (_, text) = vgpu(&["check", both.path().to_str().unwrap()]);
    let note = "pairs<1>: nothing writes '%r1', '%r2', read at pairs.cu:7 (PTX line 11), and as many in another kernel\n";
    assert!(text.starts_with(note), "{text}");
}

#[test]
fn coverage_counts_instructions_and_kernels() {
    let [good, bad] = ["last_block.ptx", "refused.ptx"].map(file);
    let files = [good.to_str().unwrap(), bad.to_str().unwrap()];
    let (code, text) = vgpu(&["coverage", files[0]]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("(100.00 %)") && text.contains("5 of 5 kernels run"), "{text}");
    let (code, text) = vgpu(&["coverage", files[0], files[1], "--format", "json"]);
    assert_eq!(code, 1, "{text}");
    let document = json(&text);
    let [all, supported] = ["all", "supported"].map(|key| document["instructions"][key].as_u64().unwrap());
    assert_eq!(all - supported, 3);
    assert_eq!(document["kernels"], serde_json::json!({ "all": 8, "run": 6 }));
    let opcodes = document["opcodes"].as_array().unwrap();
    let find = |name: &str| opcodes.iter().find(|opcode| opcode["opcode"] == name).unwrap();
    assert_eq!(find("frobnicate.u32")["count"], 2);
    assert_eq!(find("atom.global.add.u32")["supported"], true);
    let (_, text) = vgpu(&["coverage", "--all", files[1]]);
    assert!(text.contains("  ret") && text.contains("unsupported-opcode (stopped), 2 times"), "{text}");
    let (_, text) = vgpu(&["coverage", files[1], "--format", "sarif"]);
    assert_is_sarif(&json(&text));
    // A file that is no PTX is reported, and the others are counted.
    let nonsense = temporary("nonsense");
    let (code, text) = vgpu(&["coverage", nonsense.path().to_str().unwrap(), files[0]]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("refused (stopped):") && text.contains("1:1: expected a module-level"), "{text}");
    assert!(text.contains("5 of 5 kernels run"), "{text}");
}

#[test]
fn random_programs_leave_the_same_in_two_modes() {
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().to_str().unwrap();
    let (code, text) = vgpu(&["fuzz", "--seed", "3", "--programs", "30", "--out", folder]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("30 programs of seed 3 in ") && text.contains(" 0 programs differ"), "{text}");
    assert!(text.lines().any(|line| line.trim_start().starts_with("shfl ")), "{text}");
    let module = std::fs::read_to_string(out.path().join("module-000024.ptx")).unwrap();
    assert!(module.contains(".visible .entry fuzz_29("), "{module}");
    assert!(std::fs::read_to_string(out.path().join("counts.tsv")).unwrap().contains("bar.sync\t"));

    let (code, text) = vgpu(&["fuzz", "--device", "manual", "--programs", "8"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("15360 results held against the manual"), "{text}");
}

#[test]
fn a_reader_that_stops_reading_ends_no_command_with_a_panic() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_vgpu"));
    let output = command.args(["fuzz", "--programs", "6"]).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr)), (Some(0), "".into()));
}

#[test]
fn without_a_gpu_the_error_names_what_is_missing() {
    // Another machine may have a driver.
    let (code, text) = vgpu(&["fuzz", "--device", "cuda", "--gpu", "999999999", "--programs", "1"]);
    assert_eq!(code, 2, "{text}");
    let remedy = if cfg!(feature = "cuda") { "--device cuda" } else { "--features cuda" };
    assert!(text.contains(remedy), "{text}");
}
