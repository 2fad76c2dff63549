//! The descriptions of kernels. The PTX has a line for each kernel, which `#[kernel]`
//! writes; the lints hold the PTX to it.

/// Such a line begins with this; `epoxide_simt::ptx` writes it.
const PREFIX: &str = "// kernel ";

/// The compiler's own PTX marks a kernel without `shared` in its attribute with this, for a lint.
/// Shipped PTX does not have the mark.
const UNDECLARED: &str = " shared=0";

/// The properties that the PTX of a kernel must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Name of the entry.
    pub name: String,
    /// Parameters, in order.
    pub params: Vec<ParamLayout>,
    /// Most threads per block (`.maxntid`).
    pub max_threads: u32,
    /// Blocks that must fit on one multiprocessor (`.minnctapersm`).
    pub min_blocks_per_sm: u32,
    /// Number of block barriers.
    pub barriers: u32,
    /// Most registers per thread.
    pub max_registers: u32,
    /// Whether its first instruction is `griddepcontrol.wait`.
    pub dependent: bool,
    /// Why the kernel may use local memory, if it may.
    pub local_depot_allowed: Option<String>,
    /// Number of `trap` instructions.
    pub traps_allowed: u32,
    /// Whether its attribute names the bytes of dynamic shared memory. Meaningful only in the
    /// compiler's own PTX, which marks others `shared=0`. Always true in shipped PTX.
    pub names_shared: bool,
    /// The hash of its source, as text.
    pub source: String,
    /// The line of PTX that ships.
    pub line: String,
}

/// A parameter of a PTX entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamLayout {
    /// Its name in the source.
    pub name: String,
    /// Bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
}

impl KernelInfo {
    /// Reads a line; `None` where it describes no kernel.
    pub fn parse(line: &str) -> Option<Self> {
        let (name, rest) = line.strip_prefix(PREFIX)?.split_once(": ")?;
        let (facts, local) = match rest.split_once(" local=") {
            Some((facts, why)) => (facts, Some(why.to_owned())),
            None => (rest, None),
        };
        let fact = |key: &str| {
            facts
                .split(' ')
                .find_map(|fact| fact.split_once('=').filter(|(name, _)| *name == key))
                .map(|f| f.1)
        };
        let number = |key: &str| fact(key)?.parse::<u32>().ok();
        let param = |text: &str| {
            let mut parts = text.split(':');
            let name = parts.next()?.to_owned();
            let (size, align) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
            Some(ParamLayout { name, size, align })
        };
        Some(Self {
            name: name.to_owned(),
            params: fact("params")?.split(',').map(param).collect::<Option<_>>()?,
            max_threads: number("threads")?,
            min_blocks_per_sm: number("min_blocks")?,
            barriers: number("barriers")?,
            max_registers: number("registers")?,
            dependent: number("dependent")? != 0,
            local_depot_allowed: local,
            traps_allowed: number("traps")?,
            names_shared: !facts.contains(UNDECLARED),
            source: fact("source")?.to_owned(),
            line: line.replacen(UNDECLARED, "", usize::from(facts.contains(UNDECLARED))),
        })
    }
}

/// All kernels that a PTX text describes, in the order of their lines.
pub fn kernels(text: &str) -> Vec<KernelInfo> {
    text.lines().filter_map(|line| KernelInfo::parse(line.trim())).collect()
}

/// Whether a line describes a kernel.
pub fn is_description(line: &str) -> bool {
    line.trim_start().starts_with(PREFIX)
}

/// The kernel of this entry name.
pub fn find<'a>(described: &'a [KernelInfo], entry: &str) -> Option<&'a KernelInfo> {
    described.iter().find(|kernel| kernel.name == entry)
}

/// Sample kernels for the unit tests of other modules.
#[cfg(test)]
pub(crate) mod samples {
    use super::{KernelInfo, ParamLayout};

    /// The line of [`kernel`].
    pub fn line(name: &str) -> String {
        format!(
            "// kernel {name}: threads=256 min_blocks=2 barriers=1 registers=64 traps=0 dependent=0 source=00ff \
             params=src:8:8,n:4:4"
        )
    }

    /// A kernel `name(src: u64, n: u32)` of up to 256 threads, one block barrier and no exceptions.
    pub fn kernel(name: &str) -> KernelInfo {
        let param = |name: &str, size| ParamLayout { name: name.to_owned(), size, align: size };
        KernelInfo {
            name: name.to_owned(),
            params: vec![param("src", 8), param("n", 4)],
            max_threads: 256,
            min_blocks_per_sm: 2,
            barriers: 1,
            max_registers: 64,
            dependent: false,
            local_depot_allowed: None,
            traps_allowed: 0,
            names_shared: true,
            source: "00ff".to_owned(),
            line: line(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::samples::{kernel, line};
    use super::*;

    #[test]
    fn lines_are_read() {
        assert_eq!(KernelInfo::parse(&line("copy")), Some(kernel("copy")));
        let text =
            line("excused").replace("traps=0 dependent=0", "traps=3 dependent=1") + " local=a table = small";
        let excused = KernelInfo {
            local_depot_allowed: Some("a table = small".to_owned()),
            dependent: true,
            traps_allowed: 3,
            line: text.clone(),
            ..kernel("excused")
        };
        assert_eq!(KernelInfo::parse(&text), Some(excused));
        let undeclared = line("copy").replace(" source=", " shared=0 source=");
        assert_eq!(
            KernelInfo::parse(&undeclared),
            Some(KernelInfo { names_shared: false, ..kernel("copy") })
        );
        let text = format!(".version 8.4\n{}\n\t{}\n// another remark\n", line("a"), line("b"));
        assert_eq!(kernels(&text), [kernel("a"), kernel("b")]);
        assert_eq!(find(&kernels(&text), "b"), Some(&kernel("b")));
        assert_eq!(KernelInfo::parse("// kernel a: threads=many"), None);
    }
}
