//! What this machine has: cores, memory, disk, and NVIDIA GPUs as their driver reports
//! them. The daemon links no CUDA; the driver's library is opened when it is there.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use sysinfo::{Disks, MemoryRefreshKind, RefreshKind, System};

/// What this machine has.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Hardware {
    /// Logical processor cores.
    pub cores: usize,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Memory that is free now, in bytes.
    pub memory_free_bytes: u64,
    /// Free bytes on the disk that holds the data directory.
    pub disk_free_bytes: u64,
    /// NVIDIA GPUs; empty without one or without its driver.
    pub gpus: Vec<Gpu>,
}

/// One NVIDIA GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Gpu {
    /// Its number, as in `cuda:0`.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Memory that is free now, in bytes.
    pub memory_free_bytes: u64,
    /// Degrees Celsius, where it says so.
    pub temperature_c: Option<u32>,
    /// The driver's version.
    pub driver: String,
}

impl Hardware {
    /// The form that the control API shows.
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).unwrap_or(Value::Null)
    }
}

/// Looks at the machine; `path` names the disk. Takes some milliseconds.
pub fn probe(path: &Path) -> Hardware {
    let system = System::new_with_specifics(
        RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram()),
    )
    .ok();
    Hardware {
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: system.as_ref().map_or(0, System::total_memory),
        memory_free_bytes: system.as_ref().map_or(0, System::available_memory),
        disk_free_bytes: disk_free(path).unwrap_or(0),
        gpus: gpus().unwrap_or_default(),
    }
}

/// Free bytes on the disk that holds `path`; `None` when the system does not say.
pub fn disk_free(path: &Path) -> Option<u64> {
    let path = path.canonicalize().ok()?;
    Disks::new_with_refreshed_list()
        .ok()?
        .iter()
        .filter(|disk| path.starts_with(disk.mount_point()))
        .max_by_key(|disk| disk.mount_point().components().count())
        .map(sysinfo::Disk::available_space)
}

fn gpus() -> Result<Vec<Gpu>, nvml_wrapper::error::NvmlError> {
    let nvml = nvml_wrapper::Nvml::init()?;
    let driver = nvml.sys_driver_version()?;
    let mut gpus = Vec::new();
    for index in 0..nvml.device_count()? {
        let device = nvml.device_by_index(index)?;
        let memory = device.memory_info()?;
        gpus.push(Gpu {
            index,
            name: device.name()?,
            memory_bytes: memory.total,
            memory_free_bytes: memory.free,
            temperature_c: device
                .temperature(nvml_wrapper::enum_wrappers::device::TemperatureSensor::Gpu)
                .ok(),
            driver: driver.clone(),
        });
    }
    Ok(gpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_cores_memory_and_a_disk() {
        let scratch = tempfile::tempdir().unwrap();
        let hardware = probe(scratch.path());
        assert!(hardware.cores >= 1);
        assert!(hardware.memory_bytes >= hardware.memory_free_bytes);
        assert!(hardware.memory_free_bytes > 0);
        assert!(hardware.disk_free_bytes > 0);
        let json = hardware.to_json();
        assert_eq!(json["cores"], hardware.cores);
        assert!(json["gpus"].is_array());
    }
}
